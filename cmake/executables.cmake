# vla_executable(NAME MODULE [DROP_ROS_ARGUMENTS]): lib/<package>/NAME calls MODULE.main(), for "ros2 run" and launch files.
# DROP_ROS_ARGUMENTS is for programs that are no ROS nodes: launch adds "--ros-args ..." to whatever it starts.
function(vla_executable name module)
  cmake_parse_arguments(PARSE_ARGV 2 arg "DROP_ROS_ARGUMENTS" "" "")
  if(arg_DROP_ROS_ARGUMENTS)
    set(arguments "sys.argv[1 : sys.argv.index(\"--ros-args\") if \"--ros-args\" in sys.argv else None]")
  else()
    set(arguments "")
  endif()
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/executable.py.in" "${CMAKE_CURRENT_BINARY_DIR}/executables/${name}"
    @ONLY NEWLINE_STYLE UNIX)
  install(PROGRAMS "${CMAKE_CURRENT_BINARY_DIR}/executables/${name}" DESTINATION "lib/${PROJECT_NAME}")
endfunction()
